"""What `trunkline checkpoint export`, `import`, `rm` and `diff` do, and their functions."""
