"""Results of the papers' experiments: one CSV row for each run, and the tables made of them."""
