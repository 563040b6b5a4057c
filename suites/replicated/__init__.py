"""DataParallel: one process, several devices or workers."""
