"""Request bodies in the words that all APIs share: fields, messages, tools, output formats."""
