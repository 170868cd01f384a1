"""The one update procedure; it knows no engine by name and no way to move bytes."""
