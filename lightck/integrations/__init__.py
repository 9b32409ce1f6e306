"""Integrations: one module per framework, which nothing else imports, with the framework inside."""
