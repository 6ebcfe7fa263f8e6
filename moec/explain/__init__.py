"""`moec explain`: error pages, and a compiled plan in words."""
