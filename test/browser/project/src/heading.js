export const heading = "a heading";
