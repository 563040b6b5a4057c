"""Tests of DataParallel: one process, several devices or workers."""
