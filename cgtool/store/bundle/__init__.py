"""Bundles: entries of a cache as one file or folder that can be shipped, and is verified before use.

Must not import torch. A bundle is a tar archive in a single zstd frame (`*.tar.zst`), or a folder with the same
members. An archive contains exactly these members, in this order; other files in a folder are ignored::

    bundle.json                                   the index, see cgtool.store.bundle_index
    bundle.sig                                    optional, see cgtool.store.signatures
    torch_compile_cache/<hash>/key.json ...       sorted by name; the grammar is in cgtool.store.bundle_index

An archive is plain ustar: regular files, with headers exactly as Python's `tarfile` writes them from name, size and
mode (no times, no users), followed by two blocks of zeros and nothing else. Equal entries thus give equal archives, and
any other encoding is refused.

This package reads bundles from any source and installs them in a cache; the commands are in `cgtool.toolkit.bundle`.
"""
