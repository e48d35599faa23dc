{
  "tool": "https://github.com/kopia/kopia",
  "buildVersion": "v0-unofficial",
  "buildInfo": "-(unknown_revision)",
  "uniqueID": "IkQwzOM8FtG8K8G42XAX9eeI9ub/u39BMN6ZswzoeQ0=",
  "keyAlgo": "scrypt-65536-8-1",
  "encryption": "AES256_GCM",
  "encryptedBlockFormat": "iJUBZxavC4wd3tH/m2uC/JvNv2brxQj9R21aLOOGYh2FwtUVYmIeSbNROjoRCNP6692YioAjWT/q4EyxASeHQ3v5D+0bxTItXfHg7sGtQhEcEPea4zc/Otg2bngfu+XwQiDUVYn3EZHO4DySsFg8TTZKvTr/lhAoz6In9BuuPp1rg7uH/YNLS48KwDe/u2i1Y2acH3LrCsf9PfRa2KOdL8Cp7L3BUFIMdESdNKmmicOhaOrsJTHVHsKNKAeikWI3LSvEl4u7z9IgYFFxACJnP0IRr1wF/CIF1cVrkQdtOfNAbX0YNQpPiK/KdcAgALDDidmF0ZAMIKVuPrR9ZEYApOrTm/nRAhdrtF2wtXdANzR1nCifeMGf2gomlCEYIepKXwpmZkbTv2MYnveZXwQgBhIbQGuxzErhhp+BHdQMhK/y3ENMmlIWVq2Mp+RMkGmBj2t+WQ2ArznpICPQ0QJ/kuLjBU/e0sAiDPmCBsqt8+C0i5j4325aS7mm/Q6sIvo49FjjCp9ShrEJOVVBlIqv2Psu2+NV7zbZLlACFK2FceYMh74TH6CC6SQ8g/Cc0SiDHYCe5Ihx0/BNhvlP/wWiPeLB0vTTyDDcDvP3LqjhIXYVBxNbHfqlzXPHw92X5oED/oTWVuqAvXYlfJVB0V7bLn4in9Gs7FiRPF043buVBhTGyd3A7LEogM84ST+FuXMgMK/Qja6KlwykdBuuNZ9yLYm4vCZOLlojo6YP7Uwcyz+sI8Vh8DEpheqFbVdJIGYEtzvDO7USr9WRhSXK+iwljyIOnpUHKDwf1gwzFJUA"
}
