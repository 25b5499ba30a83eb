"""A job with several sources of documents."""


def toml(path, section, sources):
    tables = [
        f'[[{section}.sources]]\ndataset = "{name}"\ndataset_path = "{where}"\nweight = {weight}\n'
        for name, where, weight in sources
    ]
    path.write_text("\n".join(tables))
    return path
