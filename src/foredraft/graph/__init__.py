"""Token trees and graphs as flat arrays. Does not depend on models, text or drafters, nor on any other package here."""
