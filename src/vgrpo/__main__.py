from vgrpo.cli import main

main()
