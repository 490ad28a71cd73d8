"""Remote stores: where entries and units of many machines lie, and how they are read. Must not import torch.

A store is bytes under names (`cgtool.remote.stores`): a folder, a WebDAV server, a bucket. What lies there::

    artifacts/<sha256>.<kind>              shared by all entries and units
    entries/<hash>/<sha256>.<file>         the key, manifests, plans and files for people, each under its own digest
    entries/<hash>/<sha256>.bundle.sig     optional: signatures of the index below, by the index's digest
    entries/<hash>/<sha256>.bundle.json    the index of a bundle (`cgtool.store.bundle_index`), by its own digest
    lookup/<digest>/<hash>                 empty files: from cheap facts to entries
    clock/<token>                          empty, for a moment: what time it is there
    units/<key>                            what a piece compiled to: a sealed `cgtool.store.records.Unit`

The index is written last and names all that it needs by digest, so that a reader finds a whole bundle or none. Nothing
is ever replaced by other bytes: two machines that push one entry add two indexes, each whole, and whoever pulls merges
them. An index whose bytes differ from its name is one that is still being written, and is passed over.
"""
