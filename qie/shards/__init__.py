"""Shards: how samples are stored, found and read. This package knows nothing of models. docs/format.md is the norm.

tensors, record             one sample as bytes
index, writer               one tar of records, and the index beside it
compact_index               one index for all shards of a folder
discovery                   which shards a place holds
grid                        rows as ranges, and how they are cut into shards
reader, cache               one shard, read where it lies, or from a copy on the local disk
sample_table, shard_set     many shards as one sequence of samples: what indexes say of them, and the samples
verify                      all that is wrong with shards
"""
