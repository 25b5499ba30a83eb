"""Parts of the package that nothing else imports: each brings its options, rules and commands (core/plugins.py)."""
