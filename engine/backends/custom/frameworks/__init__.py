"""The frameworks that compute models. Each framework has a folder with its model runner. The
modules beside these folders are code that the frameworks share.
"""
