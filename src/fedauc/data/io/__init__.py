"""Reading, downloading and caching files: table readers, stored datasets, downloads, memory-mapped rows."""
