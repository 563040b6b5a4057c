"""Tests of LocalSGD and DiLoCo: ranks step alone and average."""
