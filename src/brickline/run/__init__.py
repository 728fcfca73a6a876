"""What a run on disk says beside what was measured."""
