"""Remote stores, which share entries and units between machines. Must not import torch.

A store maps names to bytes (`cgtool.remote.stores`): a folder, a WebDAV server, a bucket or a registry. Its layout::

    artifacts/<sha256>.<kind>              shared by all entries and units
    entries/<hash>/<sha256>.<file>         key, manifests, plans and files for people, each under its own digest
    entries/<hash>/<sha256>.bundle.sig     optional: signatures of the index with this digest
    entries/<hash>/<sha256>.bundle.json    the index of a bundle (`cgtool.store.bundle_index`), under its own digest
    lookup/<digest>/<hash>                 empty files, which lead from lookup digests to entries
    clock/<token>                          an empty file, written briefly to read the store's clock
    units/<key>                            a unit: a sealed `cgtool.store.records.Unit`

The index is written last and names its members by digest, so that readers find a complete bundle or none. Files are
never replaced by different bytes: two machines that push the same entry add two complete indexes, and a pull merges
them. An index whose bytes do not match its name is still being written and is skipped.
"""
