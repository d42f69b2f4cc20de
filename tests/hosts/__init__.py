"""Jobs on several hosts, each made of namespaces of this machine: see `hosts.py`."""
