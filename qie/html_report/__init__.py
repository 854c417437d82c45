"""The page that qie-stats --html writes: the content of shards, in pictures and tables."""
