// Package docs runs the documents' code. Every block of code in a page is fenced, and
// its info string has a language and one of these marks:
//
//	sh run                 runs in bash with -euo pipefail, in the order of the page, in one shell
//	sh run session=NAME    the same, in a shell of that name
//	python run             one program per page, of Python's standard library and Debian's packages
//	ts run                 one program per page, checked by the TypeScript compiler, run by Node.js
//	text                   the next block after a block that runs, in its section: the output of that
//	                       block, where … is any text; elsewhere: any text
//	json                   valid JSON, where … is left out
//	caddyfile adapt        valid for the node's program, and formatted
//	caddyfile node         the same, and part of the configuration of the node that runs the page
//	LANGUAGE from=PATH     a part of a file of this repository
//	LANGUAGE norun="WHY"   does not run, for that reason
//
// The unit tests check the marks of all pages. The integration test
// starts a node for each page that has blocks to run, with servers for the hosts that
// the page names.
package docs
