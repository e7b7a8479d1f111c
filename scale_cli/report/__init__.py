"""What every report is made with: one number format, one table, one way to draw, templates for pages and cards."""
