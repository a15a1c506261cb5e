"""How far does a reader walk from an adapter to its file, and what do names say?"""
