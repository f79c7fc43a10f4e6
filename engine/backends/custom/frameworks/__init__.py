"""Model runners, a folder for each framework; the modules beside the folders are what several
share.
"""
