"""What one paper claims, each next to what is provable."""
