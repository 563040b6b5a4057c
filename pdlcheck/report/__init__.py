"""The output for users: records, tables made of them, and progress. No module here runs or measures anything."""
