"""The KVStore: keys, arrays and operations of MXNet."""
