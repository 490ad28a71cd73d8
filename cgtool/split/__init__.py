"""Split: one full graph becomes pieces as data, with identities that no process, path or name enters."""
