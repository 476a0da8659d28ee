"""The single controller: roles, their workers, and how calls travel between them."""
