"""What a run needs, from its settings and its models' configs alone: memory, time, host, disk; and what would make it fit."""
