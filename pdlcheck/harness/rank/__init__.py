"""The pytest session that a rank process keeps."""
