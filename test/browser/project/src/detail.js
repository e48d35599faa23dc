export const detail = "a detail";
