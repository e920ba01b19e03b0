"""Token trees and graphs as flat arrays. Knows no model, no text, no drafter; imports nothing of ours."""
