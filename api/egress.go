package api

import (
	"errors"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/problem"
)

// problemOfEgress finds the Problem for the typed errors of egress, or nil.
func problemOfEgress(err error) *problem.Problem {
	var invalid *problem.InvalidError
	if errors.As(err, &invalid) {
		code := problem.RequestInvalid
		if invalid.Field == "module" {
			code = problem.PolicyInvalid
		}
		return problemOfField(code, invalid.Field, invalid.Reason, invalid.Want)
	}
	var fault *rule.Error
	if errors.As(err, &fault) {
		return problemOfRules(err)
	}
	return nil
}

// problemOfField is the Problem of one field: the name is in the path, the module is
// the body.
func problemOfField(code problem.Code, field, reason, want string) *problem.Problem {
	location := "body." + field
	switch field {
	case "name":
		location = "path.name"
		if code == problem.RequestInvalid {
			code = problem.NameInvalid
		}
	case "module":
		location = "body"
	}
	return problem.Newf(code, "%s: %s; %s", field, reason, want).
		WithErrors(problem.FieldError{Location: location, Message: reason, Hint: want})
}
