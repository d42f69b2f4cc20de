"""In the place of that of a wheel which has one."""
