module github.com/doze-run/doze/docs/pictures

go 1.26.3

require github.com/bep/goat v0.5.0
