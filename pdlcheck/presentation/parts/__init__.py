"""The sections of a report, each made from measurements or verifications."""
