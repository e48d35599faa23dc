package main

// Caddy's own modules; those of doze come with package caddymodule.
import _ "github.com/caddyserver/caddy/v2/modules/standard"
