"""What does every layer become, by each structure, under one budget over all layers?"""
