"""What a person reads: records, the tables made of them, progress. Nothing here runs or measures anything."""
