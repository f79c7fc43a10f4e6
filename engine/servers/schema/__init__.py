"""Request body parts that all APIs share: fields, messages, tools, output formats."""
