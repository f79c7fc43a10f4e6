"""Parts of request bodies that all APIs share: fields, messages, tools, output formats."""
