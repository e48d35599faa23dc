package main

// Caddy's own modules; package caddymodule contains doze's.
import _ "github.com/caddyserver/caddy/v2/modules/standard"
