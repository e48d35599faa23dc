// Compiler compiles modules for a policy.Host, which starts it under another name.
package main

import (
	"fmt"
	"os"

	_ "github.com/doze-run/doze/egress/policy" // its init compiles
)

func main() {
	fmt.Fprintln(os.Stderr, "compiler: started by a policy.Host only")
	os.Exit(2)
}
