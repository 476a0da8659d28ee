"""What a step spends its time and memory on: measured, by stage, kind of kernel and owner."""
