"""The commands `export` and `import`. `cgtool.store.bundle` defines and validates the bundle format."""
