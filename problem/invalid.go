package problem

import "fmt"

// InvalidError is a value of the caller's that cannot be used. Nothing has changed.
// It never quotes a secret.
type InvalidError struct {
	Field  string // name of the field in the API, such as hosts[2]
	Reason string // description of the error
	Want   string // how to fix it
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("%s: %s; %s", e.Field, e.Reason, e.Want)
}
