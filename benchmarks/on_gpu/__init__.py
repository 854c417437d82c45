"""What `gpu.py` measures: a table of measurements, the modules that do the work, and the process that it runs in."""
