package decode

import (
	"reflect"
	"strings"
)

// nameOf returns the name of a field in JSON, or "" if it has none.
func nameOf(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	switch {
	case !f.IsExported() || name == "-":
		return ""
	case name == "":
		return f.Name
	}
	return name
}

func fieldOf(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if n := nameOf(v.Type().Field(i)); n != "" && n == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// unknown returns an error about a field that t does not have.
func (d *decoder) unknown(t reflect.Type, name string) error {
	d.path = d.path[:len(d.path)-1]
	var known []string
	for i := range t.NumField() {
		if n := nameOf(t.Field(i)); n != "" {
			known = append(known, n)
		}
	}
	reason := `there is no "` + name + `" here, `
	if len(known) == 0 {
		return d.wrong(reason + "nor any other field")
	}
	return d.wrong(reason + "but " + strings.Join(known, ", "))
}
