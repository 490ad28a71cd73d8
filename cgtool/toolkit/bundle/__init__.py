"""The commands `export` and `import`. The form of a bundle, and what checks one, is in `cgtool.store.bundle`."""
