"""Bundles: entries of a cache as one file or folder that can be shipped, and checked before it is believed.

Must not import torch. A bundle is a tar archive in one frame of zstd (`*.tar.zst`), or a plain folder of the same
members, in which nothing else is looked at. The members, in this order, and of an archive no others::

    bundle.json                                   the index, see cgtool.store.bundle_index
    bundle.sig                                    optional, see cgtool.store.signatures
    torch_compile_cache/<hash>/key.json ...       sorted by name; the grammar is in cgtool.store.bundle_index

An archive is plain ustar: regular files, each header exactly as Python's `tarfile` writes it from name, size and
mode (no times, no users), two blocks of zeros at its end, and nothing after them. So equal entries give equal
archives, and whatever differs from that one spelling is refused.

Here is what reads one and takes it into a cache, wherever its bytes come from; the commands are in
`cgtool.toolkit.bundle`.
"""
