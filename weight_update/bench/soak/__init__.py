"""Updates by the thousand, with traffic and faults, and what leaks."""
