"""What every other part uses: errors, arrays, marked ids, options, files, memory."""
